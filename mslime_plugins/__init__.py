"""Features that mslime's distribution adds like a third party: through entry points alone (`mslime.config.plugins`).

`mslime` imports nothing from here, and trains without it.
"""
