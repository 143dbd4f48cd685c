"""What mslime's distribution adds to mslime as a third party would: by entry points alone (`mslime.config.plugins`).

`mslime` imports nothing from here, and trains without it.
"""
