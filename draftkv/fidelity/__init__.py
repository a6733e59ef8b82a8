"""Long-form generation of one model under cache policies, compared with its own uncompressed output."""
