"""One pipeline's schedule: which sequences run in which numbered step, who owns a request, when it ends."""
