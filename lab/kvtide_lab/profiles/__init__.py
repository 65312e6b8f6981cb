"""Data: profiles that ship with the package (`kvtide calibrate` made them)."""
