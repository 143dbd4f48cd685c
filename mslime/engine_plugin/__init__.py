"""mslime's plug-in for SGLang, run inside the processes of a server. Outside them only `wire` is imported."""
