"""The demo: two tiny real models, their engines, the gateway, and the comparison of all three."""
