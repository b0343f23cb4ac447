"""The processors of requests: installed, registered, resolved by name, and loaded."""
