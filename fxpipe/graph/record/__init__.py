"""Write down what opened code does."""
