"""The tcp request plane: envelopes out, typed answers back."""
