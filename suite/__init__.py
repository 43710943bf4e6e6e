"""What the scripts share beyond the paper."""
