"""What the scripts share beyond the paper. Imports run down only: no file here imports a script."""
