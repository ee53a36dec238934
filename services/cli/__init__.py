"""The command line `xds`: what a person does with a pod."""
