"""What `logitship check` looks at, one module per check."""
