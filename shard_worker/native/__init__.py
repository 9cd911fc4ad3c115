"""Compiled code for the stage: C++ behind a C interface, built by the machine's own compiler at first use."""
