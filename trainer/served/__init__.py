"""A running server measured from outside: what its drafter gets accepted and how much faster it answers."""
