"""draftkv: distil drafters for speculative decoding under the compressed KV cache they will be served with."""

__version__ = "0.1.0"
