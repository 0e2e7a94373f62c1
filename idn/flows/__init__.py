"""The mathematics: invertible dense and residual flows. Imports torch only."""
