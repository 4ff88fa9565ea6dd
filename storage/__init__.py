"""Everything that touches a file or a store; the only place with effects."""
