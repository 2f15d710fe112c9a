"""What was trained on the residues of frames: encoders that ``train`` leaves for ``predict``."""
