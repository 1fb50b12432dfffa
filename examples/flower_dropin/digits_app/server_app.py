"""The ServerApp: Flower's FedAvg, with replies screened."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import Net
from fedman.flower import Screened

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and print the model's accuracy."""
    torch.manual_seed(0)
    nodes = context.run_config["num-nodes"]
    strategy = Screened(FedAvg(min_available_nodes=nodes, min_train_nodes=nodes, min_evaluate_nodes=nodes))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"zeta": context.run_config["zeta"]}),
    )
    for server_round, metrics in result.train_metrics_clientapp.items():
        accuracy = result.evaluate_metrics_clientapp[server_round]["accuracy"]
        print(f"round {server_round}: accuracy {accuracy:.3f}, MAN term {metrics['man']:.3f}", flush=True)
