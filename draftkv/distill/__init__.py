"""Training: losses, the chunked head, the loop, checkpoints and export."""
