"""`logitship check`: tries a processor class as a server would run it, and says what is wrong with it."""
