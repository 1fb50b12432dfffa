"""How flat the loss is around a model: eigenvalues, trace and density of its Hessian or Gauss-Newton matrix, sharpness
and loss landscape, for any PyTorch module.

hessian = Hessian(model, nn.functional.cross_entropy, (x, y), batch_size=500)
eigenpairs(hessian, 20).values
hutchpp(hessian).interval
density(hessian).curve()
worst_case_sharpness(model, nn.functional.cross_entropy, (x, y), Ascent(rho=0.5)).value
"""

from fedman.flatness.ascent import Ascent
from fedman.flatness.average_sharpness import AverageSharpness, average_sharpness
from fedman.flatness.blocks import ClientBound, client_eigenvalues, layer_hessians, layers
from fedman.flatness.density import Curve, Density, density
from fedman.flatness.gauss_newton import GaussNewton
from fedman.flatness.lanczos import Eigenpairs, eigenpairs
from fedman.flatness.landscape import Landscape, filter_normalise, landscape, random_direction
from fedman.flatness.loss_at import LossAt
from fedman.flatness.m_sharpness import MSharpness, m_sharpness
from fedman.flatness.operator import Hessian, Mean, Operator
from fedman.flatness.trace import Trace, hutchinson, hutchpp
from fedman.flatness.worst_case_sharpness import WorstCaseSharpness, worst_case_sharpness

__all__ = [
    "Ascent",
    "AverageSharpness",
    "ClientBound",
    "Curve",
    "Density",
    "Eigenpairs",
    "GaussNewton",
    "Hessian",
    "Landscape",
    "LossAt",
    "MSharpness",
    "Mean",
    "Operator",
    "Trace",
    "WorstCaseSharpness",
    "average_sharpness",
    "client_eigenvalues",
    "density",
    "eigenpairs",
    "filter_normalise",
    "hutchinson",
    "hutchpp",
    "landscape",
    "layer_hessians",
    "layers",
    "m_sharpness",
    "random_direction",
    "worst_case_sharpness",
]
