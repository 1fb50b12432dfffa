"""`fedman flatness`: the Hessian analysis of finished runs."""
