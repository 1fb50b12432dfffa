"""How flat the loss is around a model: Hessian eigenvalues, trace, density and loss landscape of any PyTorch module.

hessian = Hessian(model, nn.functional.cross_entropy, (x, y), batch_size=500)
eigenpairs(hessian, 20).values
hutchpp(hessian).interval
density(hessian).curve()
"""

from fedman.flatness.blocks import ClientBound, client_eigenvalues, layer_hessians, layers
from fedman.flatness.density import Curve, Density, density
from fedman.flatness.lanczos import Eigenpairs, eigenpairs
from fedman.flatness.landscape import Landscape, filter_normalise, landscape, random_direction
from fedman.flatness.operator import Hessian, Mean, Operator
from fedman.flatness.trace import Trace, hutchinson, hutchpp

__all__ = [
    "ClientBound",
    "Curve",
    "Density",
    "Eigenpairs",
    "Hessian",
    "Landscape",
    "Mean",
    "Operator",
    "Trace",
    "client_eigenvalues",
    "density",
    "eigenpairs",
    "filter_normalise",
    "hutchinson",
    "hutchpp",
    "landscape",
    "layer_hessians",
    "layers",
    "random_direction",
]
