"""The coordinator's and the provisioner's side of scale events: answers, the public contract, a reference provisioner."""
