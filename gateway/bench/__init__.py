"""What the gateway costs: simulated engines, load and scenarios, each in a process of its own."""
