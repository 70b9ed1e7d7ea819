"""Texts by which a model is tried: an exported graph against PyTorch, int8 against float32. Questions and passages of everyday knowledge."""

from __future__ import annotations

__all__ = ["PASSAGES", "QUESTIONS"]

QUESTIONS = (
    "who wrote the first computer program",
    "when did the berlin wall come down",
    "what is the longest river in south america",
    "how many bones are there in the human hand",
    "where does the water of the caspian sea go",
    "which planet has the most moons",
    "why is the sky dark at night",
    "who painted the ceiling of the sistine chapel",
    "what language is spoken in Brazil?",
    "how long does light take to reach the earth from the sun",
    "name of the strait between africa and spain",
    "what did Marie Curie win two Nobel prizes for?",
    "tomato",
    "when was the printing press invented and by whom",
    "who was the captain of the ship that first sailed around the world",
    "dna",
)

PASSAGES = (
    "Ada Lovelace published in 1843 how Charles Babbage's Analytical Engine was to compute Bernoulli numbers. The machine was never built.",
    "The Berlin Wall was opened on the evening of 9 November 1989, after an official had told the press by mistake that the rules held at once.",
    "The Amazon carries more water than the next seven rivers together. Its sources lie in Peru, and it reaches the Atlantic near the equator.",
    "A human hand has twenty-seven bones: eight in the wrist, five in the palm and fourteen in the fingers, of which the thumb has two.",
    "The Caspian Sea has no outlet. The water that the Volga brings to it evaporates, and its level has risen and fallen by metres within a century.",
    "Saturn has more than a hundred known moons. Titan, the largest, has a thick atmosphere of nitrogen and lakes of liquid methane.",
    "If the universe were endless, everlasting and evenly filled with stars, every line of sight would end on one, and the night would be bright.",
    "Michelangelo painted the ceiling of the Sistine Chapel between 1508 and 1512, on a scaffold of his own design, standing, not lying down.",
    "Portuguese is the official language of Brazil. Some two hundred other languages are spoken there, most of them by few people.",
    "Light needs eight minutes and twenty seconds from the Sun to the Earth, and four years and three months from the next star.",
    "The Strait of Gibraltar is thirteen kilometres wide where it is narrowest. Through it the Atlantic flows into the Mediterranean at the surface.",
    "Marie Curie received the Nobel Prize for physics in 1903, for the study of radiation, and for chemistry in 1911, for radium and polonium.",
    "To a botanist a tomato is a berry. A court of the United States held in 1893 that, for the customs, it was a vegetable.",
    "Johannes Gutenberg printed with movable type of metal in Mainz from about 1450; in Korea, a book had been printed so in 1377.",
    "Magellan died in the Philippines in 1521. Juan Sebastián Elcano brought the Victoria home, with eighteen of some two hundred and forty men.",
    "Deoxyribonucleic acid is a chain of four kinds of bases, whose order says how proteins are made. Two chains wind about one another.",
)
