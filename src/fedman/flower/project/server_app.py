"""The ServerApp that `flwr run` starts."""

from flwr.serverapp import ServerApp

from fedman.flower.app import main

app = ServerApp()
app.main()(main)
