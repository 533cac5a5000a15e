"""The words the text is made of. Every table is a plain tuple of strings, in no meaningful order."""

from __future__ import annotations


def table(text: str) -> tuple[str, ...]:
    """One entry per word of the text; an underscore stands for a space inside an entry."""
    return tuple(word.replace("_", " ") for word in text.split())


WOMEN = table("""
    Ada Agnes Alma Amina Anouk Astrid Beatrix Bettina Bianca Bruna Camille Carmen Cecily Clara Cora Dagny
    Daphne Delia Edda Edith Elif Elin Elsa Emilia Esther Fatima Fiona Flora Freya Frida Gemma Gerda Greta
    Hana Hanna Harriet Hedda Helga Hilda Ida Ines Ingrid Irena Iris Isolde Ivy Jana Joan Johanna Judith
    Juno Karin Katya Kirsten Lara Leila Lena Lotte Lucia Luna Mabel Mai Marta Matilda Mei Mila Mina Miriam
    Nadia Naomi Nell Nina Nora Odette Olga Olive Paula Petra Philippa Priya Ramona Renata Rosa Rosalind
    Ruth Sabine Salma Sigrid Silvia Sonja Stella Susan Tamara Tessa Thea Tilda Ulla Ursula Valerie Vera
    Viola Wanda Willa Xenia Yara Yvonne Zelda Zoë
""")
MEN = table("""
    Aaron Adrian Albert Alvar Amir Anton Arne Arthur Axel Basil Benno Boris Bram Bruno Carlo Casper Cedric
    Conrad Dario David Diego Dmitri Edgar Edmund Eero Elias Emil Erik Ernst Farid Felix Ferdinand Finn
    Florian Fritz Gareth Gilbert Gregor Gunnar Gustav Hamid Hannes Harold Hasan Henrik Hiro Hugo Igor Ivan
    Jakob Jasper Jens Jonas Julian Kai Karl Kenji Klaus Konrad Lars Laurent Leif Leon Linus Lorenz Lucas
    Magnus Marcel Marco Martin Matteo Mikkel Milo Nils Noah Olaf Omar Oskar Otto Paolo Pascal Pavel Per
    Piet Quentin Rafael Rahul Ralph Reinhard Remy Robin Rolf Rufus Samir Simon Stefan Sven Tariq Theo
    Thomas Tobias Umar Victor Walter Wilfred Willem Yusuf Zoltan René
""")
FAMILIES = table("""
    Abbott Ackerman Albrecht Ashdown Barlow Bauer Beckett Bellamy Berg Bergström Birch Blackwood Brandt
    Bright Calloway Carver Castell Clarke Coombs Dahl Dalton Drake Duval Eastman Eklund Ellery Falk Farrow
    Fenwick Fletcher Forsberg Garland Gray Greenway Hale Hammond Hartley Hawthorne Hoffman Holm Ibsen
    Jansen Keller Kemp Kimura Lambert Larkin Lindgren Lockwood Marlow Marsh Mercer Moreau Müller Nakamura
    Nash Novak Oakley Okafor Osborne Palmer Park Pemberton Petrov Quill Ramsey Rao Redfern Ritter Rossi
    Rowan Sandoval Sawyer Schreiber Sharma Shepherd Silva Sinclair Skov Sommer Sorrel Sterling Sundberg
    Tanaka Thorne Tillman Vance Varga Vogel Wainwright Waller Webb Whitlock Winter Wood Yates Zimmerman
""")

OBJECTS = table("""
    kettle lantern key coin ring watch compass map letter book notebook pencil brush mirror comb candle
    lamp clock bell whistle flute violin drum trumpet harp guitar hat scarf coat glove boot belt umbrella
    blanket pillow cushion towel basket bucket jug cup mug plate bowl spoon fork knife pan ladle sieve jar
    bottle flask barrel sack box chest crate drawer hammer saw chisel spanner screwdriver nail screw rope
    chain hook ladder wheel axle spring gear lever pulley shovel rake hoe sickle spade trowel axe hatchet
    needle thread button ribbon zip spindle loom stamp envelope parcel postcard newspaper poster painting
    photograph statue vase pot teapot tray bracelet necklace brooch medal badge flag kite puppet doll
    marble ball dice puzzle chessboard telescope microscope magnifier thermometer barometer hourglass
    ruler scale abacus globe pen inkwell quill feather shell pebble crystal fossil lens battery cable bulb
    switch fuse motor magnet radio camera suitcase backpack wallet purse ticket passport torch helmet
    saddle bridle horseshoe oar anchor sail net rod lure cage perch collar birdhouse wheelbarrow sledge
    skate racket bat cork plug funnel tap hose brick tile plank beam pipe
""")
BOXES = table("""
    box basket drawer chest crate suitcase sack cupboard jar tin bucket trunk cabinet barrel bag case
    satchel hamper pouch wardrobe
""")
ROOMS = table("""
    kitchen cellar attic hall library workshop study pantry parlour bathroom bedroom nursery garage
    greenhouse garden courtyard porch laundry studio stable barn shed conservatory corridor balcony
    terrace orchard
""")
PLACES = table("""
    market bakery harbour station museum school chapel mill bridge square theatre hospital bathhouse
    brewery library post_office town_hall lighthouse bookshop inn observatory park ferry_landing smithy
    pharmacy tea_house printing_works boatyard flower_shop fish_market cinema concert_hall swimming_pool
    ropewalk archive watchmaker's_shop barber's_shop tram_depot customs_house windmill
""")
# Foods one can count, and foods one cannot.
COUNTED_FOODS = table("""
    pancake pie cake biscuit pudding dumpling noodle sausage ham fish herring trout salmon prawn mussel
    omelette apple pear plum cherry peach apricot grape raisin fig date orange lemon melon strawberry
    raspberry blueberry currant gooseberry walnut almond hazelnut chestnut carrot onion leek potato turnip
    radish beetroot pumpkin cucumber tomato mushroom bean lentil pea egg cabbage lettuce waffle bun roll
    sandwich cutlet pickle olive
""")
OTHER_FOODS = table("""
    bread cheese butter honey jam rice barley flour sugar salt pepper milk cream yoghurt soup stew
    porridge bacon garlic spinach corn celery parsley thyme rosemary basil mint ginger cinnamon vanilla
    saffron vinegar oil mustard tea coffee cocoa cider juice broth
""")
FOODS = COUNTED_FOODS + OTHER_FOODS
TASTES = table("hot cold salty sweet sour bitter spicy mild thin thick rich smoky creamy crisp peppery fruity")
ANIMALS = table("""
    cat dog horse donkey goat sheep cow pig hen rooster duck goose swan pigeon crow raven magpie owl hawk
    falcon heron stork robin sparrow swallow wren fox wolf bear badger otter beaver hedgehog squirrel
    rabbit hare mouse rat mole bat deer elk boar lynx frog toad newt lizard snake tortoise bee wasp moth
    butterfly beetle ant spider snail crab lobster seal dolphin whale eel pike carp
""")
PLANTS = table("""
    oak ash birch beech elm maple willow poplar pine spruce larch cedar yew holly ivy hazel hawthorn elder
    rose tulip daffodil crocus iris lily orchid poppy daisy clover thistle nettle fern moss heather
    lavender sage jasmine violet foxglove bluebell sunflower marigold reed rush bramble
""")
MATERIALS = table("""
    wooden iron copper brass silver golden tin steel glass clay stone marble leather woollen linen cotton
    silk paper wicker bamboo ivory amber rubber enamel porcelain bronze
""")
COLOURS = table("""
    red blue green yellow black white grey brown purple orange pink crimson scarlet turquoise violet cream
    silver emerald rust-coloured pale_blue dark_green olive lilac golden
""")
QUALITIES = table("""
    old new small large heavy light round square narrow wide tall short long thin thick smooth rough shiny
    dull clean dusty muddy wet dry warm cold sharp blunt broken mended cracked polished painted carved
    folded torn faded bright dark pretty plain odd rare common cheap precious fragile sturdy soft hard
    hollow empty full crooked straight loose tight rusty dented borrowed forgotten favourite spare tiny
    huge curious elegant simple clumsy delicate ancient modern handmade striped spotted patterned
    scratched battered
""")
CHARACTERS = table("""
    patient impatient cheerful gloomy brave timid clever careless careful generous stubborn kind proud
    modest curious quiet talkative honest sly gentle strict lazy busy tired hungry thirsty sleepy nervous
    calm angry delighted worried puzzled surprised disappointed grateful lonely hopeful jealous bored
    excited embarrassed polite rude thoughtful absent-minded punctual restless
""")
MANNERS = table("""
    slowly quickly quietly loudly carefully carelessly gently firmly happily sadly proudly politely
    patiently impatiently suddenly gradually eagerly reluctantly calmly nervously cheerfully secretly
    openly neatly badly silently warmly coldly bravely cautiously
""")
TRADES = table("""
    baker smith carpenter mason weaver tailor cobbler potter miller brewer fisherman farmer shepherd
    gardener beekeeper doctor nurse pharmacist teacher librarian printer bookbinder painter sculptor
    musician composer poet actor dancer clockmaker locksmith glassblower engineer surveyor sailor pilot
    conductor postman judge lawyer clerk merchant innkeeper cook astronomer chemist botanist geologist
    historian photographer mapmaker lighthouse_keeper ferryman tram_driver watchmaker
""")
NOTIONS = table("""
    patience courage memory silence luck justice friendship hope doubt time distance music weather truth
    work rest beauty danger habit change order chance knowledge trade travel harvest winter childhood age
    promise secret mistake answer question journey bargain quarrel peace news custom law story dream
""")
TEXTURES = table("""
    cloudy sunny rainy windy foggy snowy stormy frosty mild humid overcast clear drizzly hazy chilly
    breezy
""")
MONTHS = table("January February March April May June July August September October November December")
WEEKDAYS = table("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SEASONS = table("spring summer autumn winter")
DIRECTIONS = table("north north-east east south-east south south-west west north-west")

# Verbs in their base form; english.py knows how to inflect each of them.
HANDLING = table("""
    admire carry clean count cover examine fasten guard hammer inspect kick lift measure mend notice open
    paint patch polish pull push raise remember repair rinse roll scrape scrub shake smell sort squeeze
    stack study touch turn twist unwrap use wash watch weigh wrap label describe sharpen oil untie empty
    fill decorate
""")
RESTING = table("""
    laugh smile nod shrug sigh yawn wait whistle hum listen blink frown wink dance hesitate pause stare
    shiver sneeze stumble wave relax rest
""")


def season(month: int) -> str:
    """The season that month 0 (January) to 11 (December) mostly belongs to."""
    return ("winter", "spring", "summer", "autumn")[(month + 1) % 12 // 3]
