"""What every service stands on: bus, rpc, transport, configuration, tracing, logging, lifecycle, messages.

Nothing here decides anything of serving; a service imports chassis and never another service.
"""
