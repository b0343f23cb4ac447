"""`logitship check`: tests a processor class as a server would run it, and reports what is wrong with it."""
