"""Routing replay: recorded experts in place of the routers' own choice, pass by pass."""
