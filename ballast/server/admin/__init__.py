"""Change what the fleet serves: carry out operators' changes, and record them durably.

`server` alone imports it.

- `added_models`: Resolves the models and adapters that an operator adds.
- `pulls`: Downloads models at clients' request, as far as the operator allows.
- `admin_service`: Carries out changes by operators or by the fleet file.
- `simulation_job`: A simulation of the fleet that is served, as its process gets it.
- `simulations`: Runs simulations of the fleet that is served, in processes of their own.
"""
