"""The output process of a DP group: tokens to text, straight to the gateway."""
