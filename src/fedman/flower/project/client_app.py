"""The ClientApp that SuperNodes start."""

from fedman.flower import client

app = client.app
