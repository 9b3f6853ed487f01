"""The configuration: one frozen `Config`, its sections, and where their values come from."""
