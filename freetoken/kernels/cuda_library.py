def load():
    return None
