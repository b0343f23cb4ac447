"""The pseudorandom functions of the watermarks, and their detection."""
