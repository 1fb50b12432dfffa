"""The quickstart's client as the simulation's workers import it, with arrays for its data set."""

from types import SimpleNamespace

from flower_quickstart import stand_in

stand_in()

from flwr.app import Context, Message  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from pytorchexample import client_app  # noqa: E402

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    config = {"local-epochs": 1, "batch-size": 32}  # Flower refuses changes of the context's own
    return client_app.train(msg, SimpleNamespace(node_config=context.node_config, run_config=config))
