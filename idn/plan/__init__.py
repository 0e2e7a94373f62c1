"""What a run would cost on hardware that is not here."""
