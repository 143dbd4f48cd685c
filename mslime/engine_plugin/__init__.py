"""What runs inside the processes of an SGLang server: mslime's plug-in for it. Outside them only `wire` is imported."""
