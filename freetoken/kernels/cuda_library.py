def load(): return None
