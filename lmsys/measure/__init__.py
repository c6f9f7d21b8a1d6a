"""Given a callable, says what it cost. Knows no kernel."""
