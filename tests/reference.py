"""The algorithms as slow, obvious loops in numpy and float64, straight from their papers' formulas.

Nothing of the package's algebra is used: means over all clients are recomputed from tables, every client is a
Python loop, the model and its gradient are written out by hand (backpropagation through a two-layer network).
"""

from __future__ import annotations

import numpy as np

SHAPES = [(7, 5), (7,), (4, 7), (4,)]  # weight, bias, weight, bias of a 5-7-4 network
SIZES = [35, 7, 28, 4]
IS_WEIGHT = np.repeat([True, False, True, False], SIZES)


def unpack(w):
    return [part.reshape(shape) for part, shape in zip(np.split(w, np.cumsum(SIZES)[:-1]), SHAPES, strict=True)]


def objective(w, x, y, zeta, logits=True):
    """Cross-entropy + ζ(mean a1² + mean logits²), its gradient, and the cross-entropy alone."""
    W1, b1, W2, b2 = unpack(w)
    B = len(x)
    z1 = x @ W1.T + b1
    a1 = np.maximum(z1, 0)
    z2 = a1 @ W2.T + b2
    p = np.exp(z2 - z2.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    ce = -np.log(p[np.arange(B), y]).mean()
    man = (a1**2).mean() + (logits * z2**2).mean()
    d2 = p.copy()
    d2[np.arange(B), y] -= 1
    d2 = d2 / B + logits * zeta * 2 * z2 / z2.size
    da1 = d2 @ W2 + zeta * 2 * a1 / a1.size
    d1 = da1 * (z1 > 0)
    gradient = np.concatenate([(d1.T @ x).ravel(), d1.sum(0), (d2.T @ a1).ravel(), d2.sum(0)])
    return ce + zeta * man, gradient, ce


def clip(g, C):
    return g * min(1.0, C / (np.linalg.norm(g) + 1e-6))


def along(direction, length, eps=1e-7):
    """A step of this length."""
    return length * direction / (np.linalg.norm(direction) + eps)


def federate(name, hyper, w0, sizes, cohorts, batches, *, zeta, lr, lr_decay, decay, C):
    """Play the rounds; `batches(t, k)` yields client k's (x, y) in round t. Returns sel, all, cloud, tables."""
    N, n = len(sizes), np.array(sizes, float)
    p = n * N / n.sum()
    weighted = name in ("fedavg", "fedsam", "fedasam", "fedprox")
    theta = w0.copy()
    x_last = np.tile(w0, (N, 1))
    h, g_k, c_k = (np.zeros((N, len(w0))) for _ in range(3))
    g, c, m, s_bar, d = (np.zeros_like(w0) for _ in range(5))
    mu_k, s_k = (np.zeros((N, len(w0))) for _ in range(2))
    sent = [None] * N  # the model a client was sent when it last took part
    bar, sigma, before = w0.copy(), np.zeros_like(w0), None  # the server's own model, its dual, its last model sent
    v_start = hyper.get("tau", 0.0) ** 2
    v = np.full_like(w0, v_start)
    a, rho, mu, eta = (hyper.get(key, 0.0) for key in ("alpha", "rho", "mu", "eta"))
    momentum, server_lr = hyper.get("server_momentum", 0.0), hyper.get("server_lr", 1.0)
    for t, S in enumerate(cohorts):
        eta_t = lr * lr_decay**t
        D, dc = np.zeros_like(w0), np.zeros_like(w0)
        ascents, directions = {}, {}
        for k in S:
            w, K, G = theta.copy(), 0, np.zeros_like(w0)
            old = before if hyper.get("last_round") else sent[k]
            e = np.zeros_like(w0) if old is None else along(old - theta, rho)
            for x, y in batches(t, k):

                def grad(v, x=x, y=y):
                    return objective(v, x, y, zeta)[1]

                if name in ("fedavg", "fedavgm", "fedadam"):
                    w = w - eta_t * (clip(grad(w), C) + decay * w)
                elif name in ("fedprox", "fedacg"):
                    w = w - eta_t * (clip(grad(w) + mu * (w - theta), C) + decay * w)
                elif name == "fedsam":
                    s = grad(w)
                    q = grad(w + rho * s / (np.linalg.norm(s) + 1e-16))
                    w = w - eta_t * (clip(q, C) + decay * w)
                elif name == "fedasam":
                    T = np.where(IS_WEIGHT, np.abs(w) + eta, 1.0)
                    s = grad(w)
                    q = grad(w + rho * T**2 * s / (np.linalg.norm(T * s) + 1e-16))
                    w = w - eta_t * (clip(q, C) + decay * w)
                elif name == "feddyn":
                    ak = a / p[k]
                    w = w - eta_t * (clip(grad(w) + ak * (h[k] - theta), C) + (decay + ak) * w)
                elif name == "fedspeed":
                    ak = a / p[k]
                    s = grad(w) + (G if hyper.get("stale_ascent") else 0)
                    q = grad(w + rho * s / (np.linalg.norm(s) + 1e-7))
                    G = clip(q + ak * (h[k] - theta), C)
                    w = w - eta_t * (G + (decay + ak) * w)
                elif name == "feddc":
                    ak = a / p[k]
                    total = grad(w) + ak * (w + h[k] - theta) + g / p[k] - g_k[k]
                    w = w - eta_t * (clip(total, C) + decay * w)
                elif name == "scaffold":
                    w = w - eta_t * (clip(grad(w) + c / p[k] - c_k[k], C) + decay * w)
                elif name == "fedcm":
                    w = w - eta_t * (clip(a * grad(w) + (1 - a) * d, C) + decay * w)
                elif name == "mofedsam":
                    q = grad(w + along(grad(w), rho))
                    w = w - eta_t * (clip(a * q + (1 - a) * d, C) + decay * w)
                elif name == "fedgamma":
                    q = grad(w + along(grad(w), rho))
                    w = w - eta_t * (clip(q + c / p[k] - c_k[k], C) + decay * w)
                elif name == "fedsmoo":
                    ak = a / p[k]
                    e = along(grad(w) - mu_k[k] - s_bar, rho)
                    mu_k[k] = mu_k[k] + e - s_bar
                    w = w - eta_t * (clip(grad(w + e) + ak * (h[k] - theta), C) + (decay + ak) * w)
                elif name == "fedlesam":
                    w = w - eta_t * (clip(grad(w + e), C) + decay * w)
                elif name == "fedlesam-d":
                    ak = a / p[k]
                    w = w - eta_t * (clip(grad(w + e) + ak * (h[k] - theta), C) + (decay + ak) * w)
                elif name == "fedgloss":
                    beta = p[k] / a
                    q = grad(w + along(grad(w), hyper["rho_local"], 1e-16))
                    w = w - eta_t * (clip(q - s_k[k] + (w - theta) / beta, C) + decay * w)
                else:
                    raise LookupError(name)
                K += 1
            state_lr = eta_t if hyper.get("decayed", name == "fedgamma") else lr
            sent[k], ascents[k], directions[k] = theta, e, (w - theta) / (K * eta_t)
            if name == "fedgloss":
                s_k[k] -= a / p[k] * (w - theta)
            if name in ("feddyn", "fedspeed", "feddc", "fedsmoo", "fedlesam-d"):
                h[k] += w - theta
            if name == "feddc":
                new = g_k[k] - g / p[k] - (w - theta) / (K * state_lr)
                D += p[k] * (new - g_k[k])
                g_k[k] = new
            if name in ("scaffold", "fedgamma"):
                new = c_k[k] - c + (theta - w) / (K * state_lr)
                dc += p[k] * (new - c_k[k])
                c_k[k] = new
            x_last[k] = w
        share = n if weighted else np.ones(N)
        sel = sum(share[k] * x_last[k] for k in S) / sum(share[k] for k in S)
        everyone = (share[:, None] * x_last).sum(0) / share.sum()
        g, c = g + D / N, c + dc / N
        delta, before = sel - theta, theta
        if name == "fedavgm":
            m = momentum * m + delta
            theta = bar = theta + server_lr * m
        elif name == "fedadam":
            m = hyper["beta1"] * m + (1 - hyper["beta1"]) * delta
            v = hyper["beta2"] * v + (1 - hyper["beta2"]) * delta**2
            theta = bar = theta + server_lr * m / (np.sqrt(v) + hyper["tau"])
        elif name == "fedacg":
            m = momentum * m + delta
            bar = bar + m
            theta = bar + momentum * m
        elif name == "fedgloss":
            sigma = sigma - hyper.get("state_scale", 1) * a / N * sum(x_last[k] - theta for k in S)
            bar = bar + delta - sigma / a
            theta = bar - along(delta, rho, 1e-16)
        else:
            theta = bar = sel + h.mean(0)
        d = -sum(directions[k] for k in S) / len(S)
        s_bar = along(sum(mu_k[k] - (0 if hyper.get("mu_alone") else ascents[k]) for k in S) / len(S), rho)
    return {
        "sel": sel,
        "all": everyone,
        "cloud": bar,
        "x": x_last,
        "clients": {
            "h": -s_k * p[:, None] / a if name == "fedgloss" else h,
            "g": g_k,
            "c": c_k,
            "mu": mu_k,
            "before": np.array([np.zeros_like(w0) if w is None else w for w in sent]),
        },
        "server": {"w": theta, "g": g, "c": c, "m": m, "d": d, "s": s_bar, "before": before, "u": v - v_start},
    }
