"""One round's life, from listing to manifest. Knows neither Kubernetes nor a cloud."""
