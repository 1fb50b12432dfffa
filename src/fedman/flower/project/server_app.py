"""The ServerApp that `flwr run` starts."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedman.flower.app import main
from fedman.paper.presets import find_preset

app = ServerApp()


@app.main()
def run(grid: Grid, context: Context) -> None:
    main(grid, context, find_preset)
