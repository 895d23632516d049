"""Results of steps and evaluations: numbers, and some of the texts behind them."""
