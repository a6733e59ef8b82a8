"""What the drafter may attend to: policies, scorers, and the executors that apply them."""
