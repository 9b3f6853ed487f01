"""The work queue on JetStream."""
