"""Say what each part of a model costs on given hardware."""
