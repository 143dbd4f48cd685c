"""Routing replay: recorded experts in the place of the routers' own choice, pass by pass."""
