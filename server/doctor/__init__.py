"""`logitship doctor`: what a machine or a running engine means for processors."""
