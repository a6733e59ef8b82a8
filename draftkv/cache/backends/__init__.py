"""Backends of the attention kernel: `choice` names and picks them, the others are one function `attend` each."""
