"""The ClientApp. The two lines that add MAN are marked."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from digits_app.task import Net, loaders, test, train
from fedman.flower import man_mod, with_man

app = ClientApp(mods=[man_mod])  # 1: receives zeta, returns the MAN term and the round's tag


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """Train the global model on this node's samples."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader, _ = loaders(context.node_config["partition-id"], context.run_config["num-nodes"])
    criterion = with_man(nn.CrossEntropyLoss(), model)  # 2: the loss plus zeta times the MAN term
    loss = train(model, loader, context.run_config["lr"], criterion)
    metrics = MetricRecord({"loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the global model on this node's samples."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, loader = loaders(context.node_config["partition-id"], context.run_config["num-nodes"])
    metrics = MetricRecord({"accuracy": test(model, loader), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
