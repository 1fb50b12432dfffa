"""The paper: its settings by name, its printed figures, the report page, its Hessian analysis and theory."""
